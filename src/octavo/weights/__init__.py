"""Where weights come from: the catalog, the sources a name resolves to, and the files themselves."""
