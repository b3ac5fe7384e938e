"""What a client sends, before and after tokenization, and the forms of answers."""
