"""How tokens are chosen, how they become text, and when an answer ends."""
