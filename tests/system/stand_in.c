/* Stands in for macOS's libraries: the functions that are used of them, with the arguments of Apple's headers, which write
 * down what they were given. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned int natural_t;

static __thread struct { unsigned int qos; int priority; } own;
static int refuse;
static uint32_t next_id = 41, released;
static char type[200], name[200];
static uint32_t level;
static long num_strings;

void stand_in_refuse(int status) { refuse = status; }
unsigned int stand_in_own_qos(void) { return own.qos; }
int stand_in_own_priority(void) { return own.priority; }
const char *stand_in_type(void) { return type; }
const char *stand_in_name(void) { return name; }
uint32_t stand_in_level(void) { return level; }
uint32_t stand_in_released(void) { return released; }
long stand_in_num_strings(void) { return num_strings; }

/* pthread/qos.h */
int pthread_set_qos_class_self_np(unsigned int qos_class, int relative_priority) {
    if (refuse) return refuse;
    own.qos = qos_class;
    own.priority = relative_priority;
    return 0;
}

/* CoreFoundation: a string is the heap's, behind a pointer that does not fit into 32 bits */
void *CFStringCreateWithCString(void *allocator, const char *text, uint32_t encoding) {
    if (allocator != NULL || encoding != 0x08000100) return NULL;
    char *made = malloc(strlen(text) + 1);
    num_strings++;
    return strcpy(made, text);
}
void CFRelease(void *made) { free(made); num_strings--; }

/* IOKit/pwr_mgt/IOPMLib.h */
int IOPMAssertionCreateWithName(void *kind, uint32_t wanted, void *why, uint32_t *id) {
    if (refuse) return refuse;
    strncpy(type, kind, sizeof type - 1);
    strncpy(name, why, sizeof name - 1);
    level = wanted;
    *id = ++next_id;
    return 0;
}
int IOPMAssertionRelease(uint32_t id) { if (id != next_id) return 0xE00002C2; released = id; return 0; }

/* mach/vm_statistics.h, mach/mach_host.h */
struct vm_statistics64 {
    natural_t free_count, active_count, inactive_count, wire_count;
    uint64_t zero_fill_count, reactivations, pageins, pageouts, faults, cow_faults, lookups, hits, purges;
    natural_t purgeable_count, speculative_count;
    uint64_t decompressions, compressions, swapins, swapouts;
    natural_t compressor_page_count, throttled_count, external_page_count, internal_page_count;
    uint64_t total_uncompressed_pages_in_compressor;
} __attribute__((aligned(8)));

unsigned int mach_host_self(void) { return 0xFFFFFF03; }
int host_page_size(unsigned int host, uintptr_t *size) { *size = 16384; return host == 0xFFFFFF03 ? refuse : 4; }
int host_statistics64(unsigned int host, int flavor, void *out, unsigned int *count) {
    struct vm_statistics64 made = {
        .free_count = 206364, .active_count = 399751, .inactive_count = 401894, .wire_count = 106180,
        .purges = 1ull << 40, .purgeable_count = 5850, .speculative_count = 172602, .compressions = 1ull << 40,
        .compressor_page_count = 24572, .external_page_count = 647959, .internal_page_count = 326288,
        .total_uncompressed_pages_in_compressor = 229978,
    };
    if (refuse) return refuse;
    if (host != 0xFFFFFF03 || flavor != 4 || *count != sizeof made / sizeof(int)) return 4; /* KERN_INVALID_ARGUMENT */
    memcpy(out, &made, sizeof made);
    return 0;
}

/* sys/sysctl.h */
int sysctlbyname(const char *asked, void *old, size_t *length, void *new, size_t new_length) {
    static const int32_t limit = 57344;
    static const int64_t memory = 68719476736;
    const void *value = !strcmp(asked, "iogpu.wired_limit_mb") ? (void *)&limit : !strcmp(asked, "hw.memsize") ? (void *)&memory : NULL;
    size_t size = value == &limit ? sizeof limit : sizeof memory;
    if (refuse || value == NULL || new != NULL || new_length != 0 || *length < size) return -1;
    memcpy(old, value, size);
    *length = size;
    return 0;
}
