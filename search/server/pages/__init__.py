"""The pages that people see: rendered on the server, complete without JavaScript, live with it."""
