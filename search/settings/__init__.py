"""Settings that genome kinds read: the phases of a search, and the base class of all sections."""
