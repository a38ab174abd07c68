"""Methods of other papers as plug-ins, one file each: docs/systems/index.md lists them. No part of the product."""
