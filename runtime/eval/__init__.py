"""Evaluation of artifacts: perplexity, divergence from another artifact, tasks of lm-evaluation-harness."""
