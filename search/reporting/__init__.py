"""Reports of searches: what the store holds of one, put on a page. Nothing is evaluated."""
