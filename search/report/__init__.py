"""Show searches: figures, and the templates and styles of reports and pages."""
