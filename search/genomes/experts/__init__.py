"""What kinds share whose candidates keep some of a model's experts: settings, spaces, subsets and costs."""
