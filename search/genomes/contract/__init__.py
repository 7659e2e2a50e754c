"""What all genome kinds implement and share: contract, costs, operators, random numbers."""
