"""The demonstration: three workers with a real model answer questions that share one long prefix."""
