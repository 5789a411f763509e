#!/usr/bin/env bash
# Development alone: every shape of decode worth timing, float32 and float16 states, at B = 256 and 1.
#   examples/devdecode.sh PATH/TO/devdecode
set -u
program=$1
SHAPES="
-
64,128,1,four
64,128,2
64,128,2,four
64,128,2,four,loops
64,128,4
64,128,4,four
64,128,4,four,loops
64,64,4,four
64,256,2,four
64,256,4,four
128,128,4,four
128,256,2,four
128,256,4,four
32,64,2,four
32,64,4,four
32,128,2,four
32,128,4,four
32,256,4,four
16,64,2,four
64,128,4,four,once
64,128,2,four,once
128,256,4,four,once
32,128,2,four,once
64,128,4,four,blocks=2
32,128,2,four,blocks=4
32,128,4,four,blocks=4
64,256,2,four,blocks=2
"
for shape in $SHAPES; do
    for state in f32 f16; do
        if [ "$shape" = - ]; then
            "$program" $state 256,16 1,16
        else
            EDA_DECODE=$shape,strict "$program" $state 256,16 1,16
        fi
    done
done
