"""OCI artifacts in a registry: manifests, blobs, referrers, and signatures by key over them.

What is trusted. A registry, the network and whoever may push to the registry are not: each may serve any byte, an old
state, or nothing. So

- everything that is asked for by digest is hashed here before anybody reads it, within a bound of size that the caller
  or a checked descriptor states;
- JSON is parsed within bounds and checked by a model; unknown keys are ignored, as the OCI specification asks;
- a tag, and the list of what refers to a digest, are hints: who reads them must check what they lead to by a signature
  (`signatures`) or by a digest from a lock;
- what is pushed goes to the registry's own address and to no other, and logins are those of `docker login`: none is on a
  command line, in a message or in a URL.

A registry can always withhold: it can serve nothing, or an older state that was once signed. `catalog` bounds the age and
remembers the highest version for that reason.
"""
