"""Methods of other papers as plug-ins, one file each: docs/gallery.md lists them. They are no part of the product."""
