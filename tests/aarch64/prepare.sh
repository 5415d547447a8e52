#!/bin/bash
# Fetches what the emulated Arm machine is made of into $CKDIST_AARCH64: Debian's Python and C library for it, beside
# the cross compiler and QEMU, which are installed. Needs root the first time and Debian 12 or a relative with apt.
# Nothing is registered with the kernel. Run again, it does nothing.
set -euo pipefail
mkdir -p "$CKDIST_AARCH64" && cd "$CKDIST_AARCH64"
[ -e ready ] && exit 0

packages="g++-aarch64-linux-gnu qemu-user-static debootstrap"
export DEBIAN_FRONTEND=noninteractive
if ! dpkg -s $packages >/dev/null 2>&1; then
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends $packages >/dev/null
fi

# Packages are unpacked and never run as an installation: QEMU looks up the files of emulated programs below `root`.
rm -rf fetched root && mkdir root
debootstrap --download-only --arch=arm64 --variant=minbase --include=python3,libstdc++6 \
  bookworm "$PWD/fetched" >/dev/null
for package in fetched/var/cache/apt/archives/*.deb; do dpkg-deb -x "$package" root; done
rm -rf fetched
touch ready
