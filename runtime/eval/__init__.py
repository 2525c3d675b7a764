"""How well an artifact predicts: perplexity, divergence from another one, tasks of lm-evaluation-harness."""
