#!/bin/sh
# Qwen Code without a terminal, on Chat Completions: $1 is its directory of programs, $2 the instruction.
PATH=$1:$PATH
export OPENAI_MODEL="$HOLDWATER_MODEL"
exec qwen --yolo --auth-type openai --prompt "$2" </dev/null
