"""What all floors need: texts of sizes, JSON, addresses, digests, tensors' names. Standard library only."""
