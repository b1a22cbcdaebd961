"""Links between stages: which transport carries them, what they were measured to do, which codec they get."""
