"""Tables and pictures in a terminal. Values in, rich renderables out; nothing here prints."""
