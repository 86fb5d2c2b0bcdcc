"""Files and text that somebody else may have written: read without harm, and shown without harm."""
