"""The JSON of OpenAI's API, with vLLM's additions.

What requests may say beyond the fields declared here:

| field | treatment |
| --- | --- |
| those that `common` lists, `modalities` with other than text, `truncation_side` other than left | refused, 400 |
| anything else | accepted, no effect, named in the log at level debug (as vLLM) |

Refused is what would change the answer; with a value that means "off" (null, false, an empty list) it is accepted.
"""
