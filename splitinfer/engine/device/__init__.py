"""The device that computes a stage's steps: launch arrays, get a ticket; a ticket is done when the device says so."""
