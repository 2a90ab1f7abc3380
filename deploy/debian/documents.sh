#!/bin/sh
# documents.sh BINARY: writes the manual page and the shell completions, as BINARY prints them, into share/ beside it. The
# package takes them from there.
set -eu
binary=$1
folder=$(dirname "$binary")/share
mkdir -p "$folder"
"$binary" man >"$folder/order-processor.1"
"$binary" completions bash >"$folder/order-processor.bash"
"$binary" completions zsh >"$folder/_order-processor"
"$binary" completions fish >"$folder/order-processor.fish"
