// States lie in memory as float16; all arithmetic is float32.
alias StateElement = f16;
