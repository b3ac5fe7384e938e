"""One-shot scheduling: the queue, the DP partition and the policies it is compared with."""
