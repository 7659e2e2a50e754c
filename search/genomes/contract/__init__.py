"""What all genome kinds implement and share: contract, settings of phases, costs, operators, random numbers."""
