"""What a candidate's answers are worth."""
