"""How each supported model family holds its parts and routes."""
