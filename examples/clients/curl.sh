#!/bin/sh
# Talks to `llmc serve` with curl: sh curl.sh [URL] [KEY]
set -eu
url=${1:-http://127.0.0.1:8000}
key=${2:-none}

ask() {
  curl --silent --show-error --fail-with-body -H "Authorization: Bearer $key" -H "Content-Type: application/json" "$@"
  echo
}

ask "$url/ready"
ask "$url/v1/models"
ask "$url/v1/completions" -d '{"prompt": "The evening passed", "max_tokens": 16, "temperature": 0}'
ask "$url/v1/chat/completions" -d '{"messages": [{"role": "user", "content": "She was"}], "max_tokens": 16, "seed": 1}'
ask --no-buffer "$url/v1/completions" -d '{"prompt": "The evening passed", "max_tokens": 8, "seed": 1, "stream": true}'
ask "$url/tokenize" -d '{"prompt": "The evening passed"}'
