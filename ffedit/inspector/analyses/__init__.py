"""The analyses of Geva et al. 2021 (arXiv 2012.14913), each on the data that a pass has collected."""
