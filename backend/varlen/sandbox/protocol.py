"""Messages between the engine and the processes of grammars and templates."""

import struct

# Orders and answers of a grammar begin with a kind and the number of a sequence.
HEAD = struct.Struct("<BI")
# Orders: tokens of a sequence, int32, whose next mask is asked for; the end of a sequence.
ADVANCE, FORGET = 0, 1
# Answers: a mask of a bit for each token; a reason in UTF-8; the private memory of the process, in bytes.
MASK, REFUSED, MEMORY = 0, 1, 2
# Number in answers that concern the grammar itself.
COMPILED = 0
# Answers of a template begin with a kind: a text; `REFUSED` with a reason; nothing, as the text is too long; a reason
# why the template itself is not valid; a variable that it does not read, and all that it reads, as a JSON list.
TEXT, TOO_LONG, INVALID, UNREAD = 3, 4, 5, 6
