"""The JSON of OpenAI's API, with vLLM's additions.

What requests may say beyond the fields declared here:

| field | treatment |
| --- | --- |
| `best_of` other than `n`, `suffix`, `use_beam_search`, `prompt_embeds`, `bad_words`, `allowed_token_ids`, | refused, |
| `logits_processors`, `cache_salt`, `functions`, `function_call`, `audio`, `modalities` with other than text | 400 |
| `user`, `metadata`, `store`, `service_tier`, `prediction`, `reasoning_effort`, `safety_identifier`, | accepted, |
| `prompt_cache_key`, `verbosity`, `length_penalty`, `spaces_between_special_tokens`, `detokenize` | no effect |
| anything else | accepted, no effect, named in the log at level debug (as vLLM) |

Refused is what would change the answer; with a value that means "off" (null, false, an empty list) it is accepted.
"""
