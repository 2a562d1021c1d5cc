#!/bin/sh
# Cline without a terminal, on Chat Completions: $1 is its directory of programs, $2 the instruction.
set -e
PATH=$1:$PATH
export CLINE_TELEMETRY_DISABLED=1
cline auth openai --apikey "$OPENAI_API_KEY" --modelid "$HOLDWATER_MODEL" --baseurl "$OPENAI_BASE_URL" >/dev/null
exec cline --json "$2" </dev/null
