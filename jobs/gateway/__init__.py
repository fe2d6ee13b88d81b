"""The HTTP door: routes, thin: parse, call, render. Needs no accelerator."""
