"""Look after stores: upgrade, check, prune, copy."""
