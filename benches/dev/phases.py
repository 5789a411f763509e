import sys,re,collections
f=sys.argv[1]; top=int(sys.argv[2]) if len(sys.argv)>2 else 6
depth=0
def cls(op):
    if op.startswith('hmma'): return 'HMMA'
    if op.startswith(('ldsm',)): return 'LDSM'
    if op.startswith('ld.shared') or op.startswith('lds'): return 'LDS'
    if op.startswith('st.shared') or op.startswith('sts'): return 'STS'
    if op.startswith('ld.'): return 'LDG'
    if op.startswith('st.'): return 'STG'
    return op.split('.')[0]
cur=collections.Counter(); n=0; start=0; block='?'
def flush(why,i):
    global cur,n
    if n: print(f"{why:22s} n={n:5d} delay={cur.pop('__d',0):6d} ", ' '.join(f"{k}:{v}" for k,v in cur.most_common(14)))
    cur=collections.Counter(); n=0
for i,l in enumerate(open(f)):
    m=re.match(r'\s*block[.u]*\s*(\S+) (\S+)?.*\[(.*)\]',l)
    if l.startswith('block'):
        flush('-> '+l[:40].strip(),i); continue
    l2=l.split('//')[0]
    l2=re.sub(r'^\s*(@!?\S+\s+)?','',l2)
    m=re.match(r'(?:.*?=\s+)?(\S+)',l2.strip())
    if not m or '//' not in l: continue
    op=m.group(1)
    d=re.search(r'delay=(\d+)',l)
    cur['__d']+=int(d.group(1)) if d else 0
    if op.startswith('bar'):
        flush('-- barrier',i); continue
    cur[cls(op)]+=1; n+=1
flush('end',0)
