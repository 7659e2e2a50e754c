"""What searches are shown with: figures, and the templates and styles of reports and pages."""
