#!/bin/sh
# Installs Cresset: takes the program from where this script lies or from an address, compares its
# SHA-256, starts it once, and puts it into PREFIX/bin in place of an older one. What fails changes
# nothing.
set -eu

usage() {
    cat <<'END'
Usage: sh install.sh [--from PLACE] [--prefix DIR] [--sha256 DIGEST]
  --from PLACE      folder or https:// address with the program and SHA256SUMS [the script's folder]
  --prefix DIR      the program goes to DIR/bin [/usr/local for root, else ~/.local]
  --sha256 DIGEST   SHA-256 of the program, in place of what SHA256SUMS says
Cresset is proven on Linux on x86_64.
END
}

stop() {
    printf 'install.sh: %s\n' "$1" >&2
    exit 1
}

from=$(dirname -- "$0")
prefix=/usr/local
[ "$(id -u)" = 0 ] || prefix=$HOME/.local
digest=
while [ $# -gt 0 ]; do
    case $1 in
        --help) usage; exit 0 ;;
        --from | --prefix | --sha256) [ $# -gt 1 ] || stop "$1 needs a value" ;;
        *) usage >&2; exit 2 ;;
    esac
    case $1 in
        --from) from=${2%/} ;;
        --prefix) prefix=$2 ;;
        --sha256) digest=$2 ;;
    esac
    shift 2
done

system="$(uname -s) on $(uname -m)"
[ "$system" = "Linux on x86_64" ] ||
    stop "Cresset is proven on Linux on x86_64 alone, and this is $system: nothing was changed"
name=cresset-x86_64-linux

case $from in
    http://127.0.0.1[:/]* | http://localhost[:/]* | https://*) ;;
    http://*)
        # Whoever could change the program on its way could change SHA256SUMS as well.
        [ "$digest" ] || stop "$from is not https: give the program's digest with --sha256"
        ;;
esac

fetch() {
    case $from in
        http://* | https://*)
            if command -v curl >/dev/null; then
                curl --fail --silent --show-error --location --output "$2" "$from/$1"
            elif command -v wget >/dev/null; then
                wget -q -O "$2" "$from/$1"
            else
                stop "curl or wget is needed to fetch from $from"
            fi
            ;;
        *) cp -- "$from/$1" "$2" ;;
    esac || stop "$from/$1 cannot be read: nothing was changed"
}

mkdir -p -- "$prefix/bin" && place=$(mktemp -d "$prefix/bin/.cresset.XXXXXX") ||
    stop "$prefix/bin cannot be written: choose another folder with --prefix, or become root"
trap 'rm -rf -- "$place"' EXIT
trap 'exit 1' HUP INT TERM

if [ -z "$digest" ]; then
    fetch SHA256SUMS "$place/sums"
    while read -r sum file; do
        [ "${file#\*}" != "$name" ] || digest=$sum
    done <"$place/sums"
    [ "$digest" ] || stop "SHA256SUMS of $from does not name $name: nothing was changed"
fi
fetch "$name" "$place/cresset"
found=$(sha256sum <"$place/cresset")
[ "${found%% *}" = "$digest" ] ||
    stop "$name has the SHA-256 ${found%% *} and should have $digest: nothing was changed"
chmod 755 "$place/cresset"
version=$("$place/cresset" --version) ||
    stop "$name does not start on this machine: nothing was changed"
mv -f -- "$place/cresset" "$prefix/bin/cresset"
echo "$version is installed as $prefix/bin/cresset"
case :$PATH: in
    *":$prefix/bin:"*) echo "next: cresset quickstart" ;;
    *) echo "next: $prefix/bin/cresset quickstart (its folder is not in PATH)" ;;
esac
