// The highlighter's tables of programming languages. `line` and `block` are the marks of comments, `long` those of
// strings that go over several lines, `directive` is a pattern of whatever else stands out.

const words = text => new Set(text.trim().split(/\s+/));

const C_WORDS = `
  auto break case class const constexpr continue default delete do else enum explicit extern for friend goto if
  inline namespace new operator private protected public register return sizeof static struct switch template this
  throw try catch typedef typename union using virtual volatile while int char float double bool void long short
  signed unsigned
`;
const CONSTANTS = words("true false null None True False nil undefined NaN nullptr NULL self this");
const C_COMMENTS = { line: ["//"], block: [["/*", "*/"]], quotes: `"'` };

const C = {
  ...C_COMMENTS,
  keywords: words(`${C_WORDS} __global__ __device__ __shared__ __host__`),
  directive: /#\s*\w+/,
};
const JAVA = {
  ...C_COMMENTS,
  keywords: words(`
    ${C_WORDS} abstract boolean byte extends final finally implements import instanceof interface native package
    super synchronized throws transient var record sealed fun val when is in object override open internal async
    await string foreach get set readonly partial out ref base decimal
  `),
  directive: /@\w+/,
};
const JAVASCRIPT = {
  ...C_COMMENTS,
  long: [["`", "`"]],
  keywords: words(`
    async await break case catch class const continue debugger default delete do else export extends finally for
    from function get if import in instanceof interface let new of return set static super switch throw try type
    typeof var void while with yield enum implements private public readonly as declare namespace keyof number
    string boolean any unknown never
  `),
};
const PYTHON = {
  line: ["#"],
  long: [
    ['"""', '"""'],
    ["'''", "'''"],
  ],
  quotes: `"'`,
  directive: /@[\w.]+/,
  keywords: words(`
    and as assert async await break case class continue def del elif else except finally for from global if import
    in is lambda match nonlocal not or pass raise return try while with yield
  `),
};
const RUST = {
  ...C_COMMENTS,
  quotes: '"',
  directive: /#!?\[[^\]]*\]|\w+!/,
  keywords: words(`
    as async await break const continue crate dyn else enum extern fn for if impl in let loop match mod move mut
    pub ref return Self static struct super trait type unsafe use where while bool char str u8 u16 u32 u64 usize
    i8 i16 i32 i64 isize f32 f64
  `),
};
const GO = {
  ...C_COMMENTS,
  long: [["`", "`"]],
  keywords: words(`
    break case chan const continue default defer else fallthrough for func go goto if import interface map package
    range return select struct switch type var string int int64 uint byte rune error bool float64 any
  `),
};
const SHELL = {
  line: ["#"],
  quotes: `"'`,
  directive: /\$\{?\w+\}?|(?<!\w)--?[\w-]+/,
  keywords: words(`
    if then else elif fi for while until do done case esac in function return export local echo cd source set exit
    sudo test
  `),
};
const SQL = {
  line: ["--"],
  block: [["/*", "*/"]],
  quotes: `"'`,
  ignoresCase: true,
  keywords: words(`
    select from where and or not insert into values update set delete create table view index drop alter add
    primary key foreign references join left right inner outer full on as group by order having limit offset union
    all distinct case when then else end null is in like between exists with returning integer text varchar
    boolean default unique constraint begin commit
  `),
};
const RUBY = {
  line: ["#"],
  quotes: `"'`,
  directive: /@{1,2}\w+|:\w+/,
  keywords: words(`
    alias and begin break case class def do else elsif end ensure for if in module next not or redo require rescue
    retry return super then unless until when while yield attr_accessor attr_reader
  `),
};
const DATA = { line: ["#"], quotes: `"'`, keywords: words(""), directive: /(?:^|(?<=\s))[\w.-]+(?=\s*[:=](?:\s|$))/ };
const JSON_TEXT = { line: ["//"], quotes: '"', keywords: words(""), directive: /"(?:\\.|[^"\\])*"(?=\s*:)/ };
const CSS = { block: [["/*", "*/"]], quotes: `"'`, keywords: words(""), directive: /[@.#][\w-]+|[\w-]+(?=\s*:)/ };
const MARKUP = { block: [["<!--", "-->"]], quotes: '"', keywords: words(""), directive: /<\/?[\w:-]+|\/?>/ };
const LUA = {
  line: ["--"],
  long: [["[[", "]]"]],
  quotes: `"'`,
  keywords: words(`
    and break do else elseif end for function goto if in local not or repeat return then until while
  `),
};

const NAMES = {
  c: C,
  cpp: C,
  "c++": C,
  cc: C,
  h: C,
  hpp: C,
  cuda: C,
  cu: C,
  glsl: C,
  objc: C,
  java: JAVA,
  kotlin: JAVA,
  kt: JAVA,
  cs: JAVA,
  csharp: JAVA,
  "c#": JAVA,
  swift: JAVA,
  scala: JAVA,
  dart: JAVA,
  php: JAVA,
  js: JAVASCRIPT,
  javascript: JAVASCRIPT,
  jsx: JAVASCRIPT,
  mjs: JAVASCRIPT,
  ts: JAVASCRIPT,
  tsx: JAVASCRIPT,
  typescript: JAVASCRIPT,
  py: PYTHON,
  python: PYTHON,
  python3: PYTHON,
  pycon: PYTHON,
  rust: RUST,
  rs: RUST,
  go: GO,
  golang: GO,
  ruby: RUBY,
  rb: RUBY,
  sh: SHELL,
  bash: SHELL,
  shell: SHELL,
  zsh: SHELL,
  console: SHELL,
  dockerfile: SHELL,
  makefile: SHELL,
  make: SHELL,
  sql: SQL,
  sqlite: SQL,
  postgresql: SQL,
  mysql: SQL,
  yaml: DATA,
  yml: DATA,
  toml: DATA,
  ini: DATA,
  properties: DATA,
  json: JSON_TEXT,
  jsonc: JSON_TEXT,
  json5: JSON_TEXT,
  css: CSS,
  scss: CSS,
  less: CSS,
  html: MARKUP,
  xml: MARKUP,
  svg: MARKUP,
  vue: MARKUP,
  lua: LUA,
};

/** Return the language that is named behind the fence of a code block, or null. */
export function languageOf(info) {
  const name = info
    .trim()
    .split(/[\s{,:]/)[0]
    .toLowerCase();
  return Object.hasOwn(NAMES, name) ? NAMES[name] : null;
}

export const isConstant = word => CONSTANTS.has(word);
