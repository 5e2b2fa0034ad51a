// Empty: the target only builds the precompiled header.
