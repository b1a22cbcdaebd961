"""Makes a demo pair from a folder of text: one tokenizer, a target model and a smaller draft.

    text --corpus--> books --tokenizer--> token ids --training--> weights --folders--> OUT/target, OUT/draft
                                                                                              |
                             a table, and one line of JSON  <--report--  figures  <--judging--+

The target and the draft are trained separately to predict the next token (plain cross-entropy); they share a tokenizer,
which is all that speculative decoding needs. Not part of the package: ``scripts/train_demo_model`` runs it.
"""
