def run_chat(llm, params):
    return 0
