"""What a step costs each stage, links and drafts: learned once from every step, and read by all who decide."""
