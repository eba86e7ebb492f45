# Being written by the lead: do not write this file; build the rest (transformers, caches, tests of your parts, command, docs, benchmark).
