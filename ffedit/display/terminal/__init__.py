"""Tables and heat maps in a terminal: functions from values to rich renderables; nothing here prints."""
