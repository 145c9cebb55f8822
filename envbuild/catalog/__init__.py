"""The catalogue of what a registry holds: signed, small enough to be fetched whole, and read by nobody but clients.

Threat model. The registry, the network and whoever may push there may be hostile: they may serve any byte, hide what is
there, show an old state again, or move any tag. What is trusted is

- the public keys in the settings (`trusted_keys`), and how many of them must have signed (`trusted_signatures`);
- the locks and evidence records of this installation;
- this machine's cache, which remembers the highest version of each registry's catalogue.

From these follows what is used: the catalogue's manifest is signed, names the catalogue's bytes by digest, and these name
each lock and each image by digest. No digest is taken from a tag. What is not signed, signed by too few, older than
`catalog_max_age_days`, or of a lower version than this machine has seen is a LockError (exit 4), and nothing is tagged.

What this cannot do. A registry that withholds new versions is noticed by the catalogue's age alone. A machine that never
saw a catalogue, or whose cache was removed, takes the version that it is shown, within the age. Who holds enough of the
keys decides what the catalogue says; what an image does is not judged here.
"""
