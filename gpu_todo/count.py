import re, sys, collections
text = re.sub(r'backend_config=\{"dialect.*', '', open(sys.argv[1]).read())
comps = {}; cur=None
for line in text.splitlines():
    m = re.match(r'^(ENTRY )?%?([\w.\-]+) .*\{$', line) or re.match(r'^(ENTRY )?%?([\w.\-]+) \(.*\{', line)
    if m and not line.startswith(' '): cur=m.group(2); comps[cur]=[]
    elif line.startswith('}'): cur=None
    elif cur and ' = ' in line: comps[cur].append(line.strip())
entry=[l for l in text.splitlines() if re.search(r' while\(', l)]
for l in entry: print(re.sub(r'^.*? while\(', 'while(', l)[:50], re.findall(r'(?:condition|body)=%?([\w.\-]+)', l), re.findall(r'known_trip_count[^}]*}', l), l[-200:])
if len(sys.argv)>2: bodies=[sys.argv[2]]
else: bodies=[re.search(r'body=%?([\w.\-]+)', l).group(1) for l in entry]
for b in bodies:
    c=collections.Counter()
    def walk(comp, depth=0):
        for l in comps[comp]:
            m=re.match(r'(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(', l)
            if not m: continue
            name, shape, op = m.groups()
            if op in('parameter','get-tuple-element','tuple','bitcast','constant','after-all'): continue
            key=op
            if op=='custom-call': key+=' '+re.search(r'custom_call_target="([^"]*)"', l).group(1)
            if op=='fusion':
                key+=' '+ (re.search(r'kind=(\w+)', l).group(1))
            if op=='call':
                walk(re.search(r'to_apply=%?([\w.\-]+)', l).group(1)); continue
            c[key]+=1
            rows.append((key, name, shape[:90]))
    rows=[]
    walk(b)
    print(b, sum(c.values())); 
    for k,v in c.most_common(): print('  ', v, k)
    if len(rows)>40:
        names=collections.Counter((k, re.sub(r'[.\d]+$','',n), s) for k,n,s in rows)
        for (k,n,s),v in sorted(names.items(), key=lambda x:-x[1]): print('     ', v, k, n, s)
