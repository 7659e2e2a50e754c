"""What every kind of genome implements and shares: the contract, costs, operators, random numbers."""
