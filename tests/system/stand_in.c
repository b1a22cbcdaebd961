/* Stands in for macOS's libraries: the functions that are used of them, with the arguments of Apple's headers, which write
 * down what they were given. */
#include <pthread.h>
#include <stdint.h>
#include <string.h>

static __thread struct { unsigned int qos; int priority; } own;
static int refuse;

void stand_in_refuse(int status) { refuse = status; }
unsigned int stand_in_own_qos(void) { return own.qos; }
int stand_in_own_priority(void) { return own.priority; }

/* pthread/qos.h */
int pthread_set_qos_class_self_np(unsigned int qos_class, int relative_priority) {
    if (refuse) return refuse;
    own.qos = qos_class;
    own.priority = relative_priority;
    return 0;
}

/* sys/sysctl.h */
int sysctlbyname(const char *asked, void *old, size_t *length, void *new, size_t new_length) {
    static const int32_t limit = 57344;
    static const int64_t memory = 68719476736;
    static const char chip[] = "Apple M4 Max";
    const void *value = NULL;
    size_t size = 0;
    if (!strcmp(asked, "iogpu.wired_limit_mb")) value = &limit, size = sizeof limit;
    if (!strcmp(asked, "hw.memsize")) value = &memory, size = sizeof memory;
    if (!strcmp(asked, "machdep.cpu.brand_string")) value = chip, size = sizeof chip;
    if (refuse || value == NULL || new != NULL || new_length != 0 || *length < size) return -1;
    memcpy(old, value, size);
    *length = size;
    return 0;
}
