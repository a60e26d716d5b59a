"""What sparse attention loses against dense: found statements, likelihoods, and the attention that it leaves out."""
