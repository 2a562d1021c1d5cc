#!/bin/sh
# Copies the text files of a directory: backup.sh SOURCE TARGET

mkdir -p $2
count=0
cd $1
for file in $(ls *.txt); do
    cp $file $OLDPWD/$2/
    count=$((count + 1))
done
[ $count -eq 0 ] && count=1
echo "copied: $count"
