'''dockerfiles/Dockerfile.j2 as Python. Written by scripts/compile_template.py: do not edit.

Long because Jinja writes a line for each piece of the template.
'''
# mypy: ignore-errors
from envbuild.plan.template_runtime import LoopContext, Macro, Markup, TemplateRuntimeError, Undefined, escape, identity, internalcode, markup_join, missing

OF = "a34028d07cd770c214a0334beab65789b71e91c44bf63024c822088ac54a8514"
name = 'Dockerfile.j2'

def root(context, missing=missing, *, environment):
    resolve = context.resolve_or_missing
    undefined = environment.undefined
    concat = environment.concat
    cond_expr_undefined = Undefined
    if 0: yield None
    l_0_plan = resolve('plan')
    l_0_file = l_0_site = l_0_uv = l_0_uv_cache = l_0_apt = l_0_recipe = l_0_listed = l_0_os_install = l_0_environment = l_0_managed_python = l_0_date = l_0_python_layer = l_0_byte_compiled = l_0_compiled_library = l_0_own_files = missing
    try:
        t_1 = environment.filters['commas']
    except KeyError:
        @internalcode
        def t_1(*unused):
            raise TemplateRuntimeError("No filter named 'commas' found.")
    try:
        t_2 = environment.filters['comment']
    except KeyError:
        @internalcode
        def t_2(*unused):
            raise TemplateRuntimeError("No filter named 'comment' found.")
    try:
        t_3 = environment.filters['envpath']
    except KeyError:
        @internalcode
        def t_3(*unused):
            raise TemplateRuntimeError("No filter named 'envpath' found.")
    try:
        t_4 = environment.filters['envquote']
    except KeyError:
        @internalcode
        def t_4(*unused):
            raise TemplateRuntimeError("No filter named 'envquote' found.")
    try:
        t_5 = environment.filters['heredoc']
    except KeyError:
        @internalcode
        def t_5(*unused):
            raise TemplateRuntimeError("No filter named 'heredoc' found.")
    try:
        t_6 = environment.filters['join']
    except KeyError:
        @internalcode
        def t_6(*unused):
            raise TemplateRuntimeError("No filter named 'join' found.")
    try:
        t_7 = environment.filters['word']
    except KeyError:
        @internalcode
        def t_7(*unused):
            raise TemplateRuntimeError("No filter named 'word' found.")
    try:
        t_8 = environment.filters['words']
    except KeyError:
        @internalcode
        def t_8(*unused):
            raise TemplateRuntimeError("No filter named 'words' found.")
    pass
    yield '# envbuild: '
    yield escape(environment.finalize(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'cell'), 'id')))
    yield ' ('
    yield escape(environment.finalize(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'lock'), 'flavor')))
    if environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'lock'), 'stack'):
        pass
        yield ', stack '
        yield escape(environment.finalize(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'lock'), 'stack')))
    yield ')\n'
    if (not environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'lock'), 'complete')):
        pass
        yield '# UNLOCKED: inputs are named by tag and version, not by hash. Two builds of this file may differ.\n'
        def t_9(fiter):
            for l_1_item in fiter:
                if (environment.getattr(l_1_item, 'host') != '-'):
                    yield l_1_item
        for l_1_item in t_9(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'lock'), 'missing')):
            _loop_vars = {}
            pass
            yield '#   missing: '
            yield escape(environment.finalize(t_2(environment.getattr(l_1_item, 'what'))))
            yield ' (held by '
            yield escape(environment.finalize(t_2(environment.getattr(l_1_item, 'host'))))
            yield ')\n'
        l_1_item = missing
    else:
        pass
        yield '# Lock '
        yield escape(environment.finalize(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'lock'), 'digest')))
        yield ': every input is pinned by hash.\n'
    if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'platform'):
        pass
        yield '# Platform '
        yield escape(environment.finalize(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'platform')))
        yield ': docker build --platform '
        yield escape(environment.finalize(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'platform')))
        yield ', on a machine of that kind or one that emulates it.\n'
    yield '# Each external input is a stage of its own and can be replaced: --build-context NAME=…\n#   '
    yield escape(environment.finalize(t_2(t_6(context.eval_ctx, environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'external'), ', '))))
    yield '\n'
    def macro(l_1_path, l_1_text):
        t_10 = []
        if l_1_path is missing:
            l_1_path = undefined("parameter 'path' was not provided", name='path')
        if l_1_text is missing:
            l_1_text = undefined("parameter 'text' was not provided", name='text')
        pass
        t_10.extend((
            "COPY <<'envbuild_end' ",
            escape(environment.finalize(l_1_path)),
            '\n',
            escape(environment.finalize(t_5(l_1_text))),
            'envbuild_end',
        ))
        return concat(t_10)
    context.exported_vars.add('file')
    context.vars['file'] = l_0_file = Macro(environment, macro, 'file', ('path', 'text'), False, False, False, context.eval_ctx.autoescape)
    t_11 = []
    pass
    t_11.append(
        '--mount=type=secret,id=env,target=/run/envbuild/site/env --mount=type=secret,id=ca,target=/run/envbuild/site/ca.crt',
    )
    l_0_site = (Markup if context.eval_ctx.autoescape else identity)(concat(t_11))
    context.vars['site'] = l_0_site
    context.exported_vars.add('site')
    t_12 = []
    pass
    t_12.append(
        '--mount=type=bind,from=uv,target=/run/envbuild/uv',
    )
    l_0_uv = (Markup if context.eval_ctx.autoescape else identity)(concat(t_12))
    context.vars['uv'] = l_0_uv
    context.exported_vars.add('uv')
    t_13 = []
    pass
    t_13.append(
        '--mount=type=cache,id=envbuild-uv,target=/root/.cache/uv',
    )
    l_0_uv_cache = (Markup if context.eval_ctx.autoescape else identity)(concat(t_13))
    context.vars['uv_cache'] = l_0_uv_cache
    context.exported_vars.add('uv_cache')
    t_14 = []
    pass
    t_14.append(
        '--mount=type=tmpfs,target=/var/cache/apt --mount=type=tmpfs,target=/var/lib/apt/lists --mount=type=tmpfs,target=/var/log',
    )
    l_0_apt = (Markup if context.eval_ctx.autoescape else identity)(concat(t_14))
    context.vars['apt'] = l_0_apt
    context.exported_vars.add('apt')
    def macro(l_1_name):
        t_15 = []
        if l_1_name is missing:
            l_1_name = undefined("parameter 'name' was not provided", name='name')
        pass
        t_15.extend((
            '--mount=type=bind,from=recipe,source=/',
            escape(environment.finalize(l_1_name)),
            ',target=/run/envbuild/recipe/',
            escape(environment.finalize(l_1_name)),
        ))
        return concat(t_15)
    context.exported_vars.add('recipe')
    context.vars['recipe'] = l_0_recipe = Macro(environment, macro, 'recipe', ('name',), False, False, False, context.eval_ctx.autoescape)
    def macro(l_1_name):
        t_16 = []
        if l_1_name is missing:
            l_1_name = undefined("parameter 'name' was not provided", name='name')
        pass
        t_16.extend((
            '--mount=type=bind,from=lists,source=/',
            escape(environment.finalize(l_1_name)),
            ',target=/run/envbuild/',
            escape(environment.finalize(l_1_name)),
        ))
        return concat(t_16)
    context.exported_vars.add('listed')
    context.vars['listed'] = l_0_listed = Macro(environment, macro, 'listed', ('name',), False, False, False, context.eval_ctx.autoescape)
    def macro(l_1_set):
        t_17 = []
        if l_1_set is missing:
            l_1_set = undefined("parameter 'set' was not provided", name='set')
        pass
        t_17.extend((
            'RUN ',
            escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), 'os-install'))),
            ' \\\n    ',
            escape(environment.finalize(context.call((undefined(name='listed') if l_0_listed is missing else l_0_listed), markup_join(('os.', l_1_set, '.txt', ))))),
            ' \\\n    --mount=type=bind,from=debs,target=/run/envbuild/debs \\\n    --mount=type=secret,id=apt,target=/run/envbuild/site/apt.list \\\n    ',
            escape(environment.finalize((undefined(name='site') if l_0_site is missing else l_0_site))),
            ' \\\n    ',
            escape(environment.finalize((undefined(name='apt') if l_0_apt is missing else l_0_apt))),
            ' \\\n    sh /run/envbuild/recipe/os-install /run/envbuild/os.',
            escape(environment.finalize(l_1_set)),
            '.txt',
        ))
        return concat(t_17)
    context.exported_vars.add('os_install')
    context.vars['os_install'] = l_0_os_install = Macro(environment, macro, 'os_install', ('set',), False, False, False, context.eval_ctx.autoescape)
    t_18 = []
    pass
    t_18.append(
        'ENV ',
    )
    l_2_loop = missing
    for (l_2_k, l_2_v), l_2_loop in LoopContext(context.call(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'environment'), 'items')), undefined):
        _loop_vars = {}
        pass
        t_18.extend((
            escape(environment.finalize(l_2_k)),
            '=',
            escape(environment.finalize(t_3(l_2_v, l_2_k))),
        ))
        if (not environment.getattr(l_2_loop, 'last')):
            pass
            t_18.append(
                ' \\\n',
            )
    l_2_loop = l_2_k = l_2_v = missing
    t_18.append(
        '\n',
    )
    l_0_environment = (Markup if context.eval_ctx.autoescape else identity)(concat(t_18))
    context.vars['environment'] = l_0_environment
    context.exported_vars.add('environment')
    yield '\n'
    t_19 = []
    pass
    if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'managed_python'):
        pass
        t_19.append(
            "RUN --mount=type=bind,from=src-python,target=/run/envbuild/python \\\n    mkdir -p /opt/python && tar -xzf /run/envbuild/python/*.tar.gz -C /opt/python --strip-components=1 --no-same-owner --exclude='*.o'\n",
        )
    l_0_managed_python = (Markup if context.eval_ctx.autoescape else identity)(concat(t_19))
    context.vars['managed_python'] = l_0_managed_python
    context.exported_vars.add('managed_python')
    t_20 = []
    pass
    t_20.append(
        'find /layer -newermt 1980-01-02 -exec touch -h -d @315532800 {} +',
    )
    l_0_date = (Markup if context.eval_ctx.autoescape else identity)(concat(t_20))
    context.vars['date'] = l_0_date
    context.exported_vars.add('date')
    def macro(l_1_layer):
        t_21 = []
        if l_1_layer is missing:
            l_1_layer = undefined("parameter 'layer' was not provided", name='layer')
        pass
        t_21.extend((
            'RUN ',
            escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), 'python-install'))),
            ' ',
            escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), 'compile-pyc'))),
            ' ',
        ))
        if (environment.getattr(l_1_layer, 'stage') != 'torch-rest'):
            pass
            t_21.extend((
                escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), 'python-layer'))),
                ' ',
            ))
        t_21.extend((
            '\\\n    --mount=type=bind,from=lists,source=/python/',
            escape(environment.finalize(environment.getattr(l_1_layer, 'stage'))),
            '.txt,target=/run/envbuild/python.txt \\\n    --mount=type=bind,from=wheels,target=/run/envbuild/wheels \\\n    ',
            escape(environment.finalize((undefined(name='uv') if l_0_uv is missing else l_0_uv))),
            ' ',
            escape(environment.finalize((undefined(name='uv_cache') if l_0_uv_cache is missing else l_0_uv_cache))),
            ' \\\n    ',
            escape(environment.finalize((undefined(name='site') if l_0_site is missing else l_0_site))),
            ' \\\n    export ENVBUILD_PYTHON=',
            escape(environment.finalize(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'python'))),
        ))
        if ((environment.getattr(l_1_layer, 'of') == 'torch') and context.call(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'index'), 'torch')):
            pass
            t_21.extend((
                ' ENVBUILD_INDEX=',
                escape(environment.finalize(context.call(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'index'), 'torch'))),
            ))
        if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'provided'):
            pass
            t_21.append(
                ' ENVBUILD_SYSTEM_SITE=1',
            )
        t_21.append(
            ' \\\n',
        )
        if (environment.getattr(l_1_layer, 'stage') == 'torch-rest'):
            pass
            t_21.append(
                '    && sh /run/envbuild/recipe/python-install /opt/venv /run/envbuild/python.txt \\\n    && PYTHONDONTWRITEBYTECODE=1 /opt/venv/bin/python /run/envbuild/recipe/compile-pyc /opt/venv \\\n    && mkdir -p /layer/opt && mv /opt/venv /layer/opt/venv \\\n',
            )
        else:
            pass
            t_21.append(
                '    && sh /run/envbuild/recipe/python-layer /run/envbuild/python.txt \\\n',
            )
        t_21.extend((
            '    && ',
            escape(environment.finalize((undefined(name='date') if l_0_date is missing else l_0_date))),
        ))
        return concat(t_21)
    context.exported_vars.add('python_layer')
    context.vars['python_layer'] = l_0_python_layer = Macro(environment, macro, 'python_layer', ('layer',), False, False, False, context.eval_ctx.autoescape)
    def macro(l_1_root):
        t_22 = []
        if l_1_root is missing:
            l_1_root = undefined("parameter 'root' was not provided", name='root')
        pass
        t_22.extend((
            escape(environment.finalize(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'python'))),
            ' -c \'import py_compile, sys; [py_compile.compile("',
            escape(environment.finalize(l_1_root)),
            '" + f, dfile=f, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH) for f in sys.argv[1:]]\'',
        ))
        return concat(t_22)
    context.exported_vars.add('byte_compiled')
    context.vars['byte_compiled'] = l_0_byte_compiled = Macro(environment, macro, 'byte_compiled', ('root',), False, False, False, context.eval_ctx.autoescape)
    def macro(l_1_root):
        t_23 = []
        if l_1_root is missing:
            l_1_root = undefined("parameter 'root' was not provided", name='root')
        pass
        t_23.extend((
            'PYTHONDONTWRITEBYTECODE=1 ',
            escape(environment.finalize(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'python'))),
            ' /run/envbuild/recipe/compile-pyc --own "',
            escape(environment.finalize(l_1_root)),
            '"',
        ))
        return concat(t_23)
    context.exported_vars.add('compiled_library')
    context.vars['compiled_library'] = l_0_compiled_library = Macro(environment, macro, 'compiled_library', ('root',), False, False, False, context.eval_ctx.autoescape)
    def macro(l_1_root):
        t_24 = []
        if l_1_root is missing:
            l_1_root = undefined("parameter 'root' was not provided", name='root')
        pass
        for (l_2_path, l_2_name) in context.call(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'files'), 'items')):
            _loop_vars = {}
            pass
            t_24.extend((
                'install -D -m 644 /run/envbuild/image/',
                escape(environment.finalize(l_2_name)),
                ' ',
                escape(environment.finalize(l_1_root)),
                escape(environment.finalize(l_2_path)),
                ' \\\n    && ',
            ))
        l_2_path = l_2_name = missing
        if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'workspace'):
            pass
            t_24.extend((
                'install -d -m 1777 ',
                escape(environment.finalize(l_1_root)),
                escape(environment.finalize(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'workspace'))),
                ' \\\n    && ',
            ))
        t_24.append(
            escape(environment.finalize(context.call((undefined(name='byte_compiled') if l_0_byte_compiled is missing else l_0_byte_compiled), l_1_root))),
        )
        def t_25(fiter):
            for l_2_path in fiter:
                if context.call(environment.getattr(l_2_path, 'endswith'), '.py'):
                    yield l_2_path
        for l_2_path in t_25(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'files')):
            _loop_vars = {}
            pass
            t_24.extend((
                ' ',
                escape(environment.finalize(l_2_path)),
            ))
        l_2_path = missing
        return concat(t_24)
    context.exported_vars.add('own_files')
    context.vars['own_files'] = l_0_own_files = Macro(environment, macro, 'own_files', ('root',), False, False, False, context.eval_ctx.autoescape)
    yield '# --- external inputs\n'
    if environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'lock'), 'root'):
        pass
        yield '# A Debian root: mmdebstrap makes rootfs.tar from the packages that the lock names.\nFROM '
        if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'platform'):
            pass
            yield '--platform='
            yield escape(environment.finalize(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'platform')))
            yield ' '
        yield 'scratch AS base\nADD rootfs.tar /\n'
    for l_1_image in environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'lock'), 'images'):
        _loop_vars = {}
        pass
        yield 'FROM '
        if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'platform'):
            pass
            yield '--platform='
            yield escape(environment.finalize(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'platform')))
            yield ' '
        yield escape(environment.finalize(t_7(environment.getattr(l_1_image, 'reference'))))
        if environment.getattr(l_1_image, 'digest'):
            pass
            yield '@'
            yield escape(environment.finalize(environment.getattr(l_1_image, 'digest')))
        yield ' AS '
        yield escape(environment.finalize(environment.getattr(l_1_image, 'stage')))
        yield '\n'
    l_1_image = missing
    yield '\nFROM scratch AS debs\nFROM scratch AS wheels\n\nFROM scratch AS uv-wheel\nADD --checksum=sha256:'
    yield escape(environment.finalize(environment.getattr(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'lock'), 'uv'), 'sha256')))
    yield ' '
    yield escape(environment.finalize(t_7(environment.getattr(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'lock'), 'uv'), 'url'))))
    yield ' /uv.whl\n'
    for l_1_source in environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'lock'), 'sources'):
        _loop_vars = {}
        pass
        yield '\nFROM scratch AS src-'
        yield escape(environment.finalize(environment.getattr(l_1_source, 'name')))
        yield '\nADD '
        yield escape(environment.finalize(t_7(environment.getattr(l_1_source, 'url'))))
        yield '#'
        yield escape(environment.finalize(environment.getattr(l_1_source, 'commit')))
        yield ' /\n'
    l_1_source = missing
    for l_1_source in environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'lock'), 'files'):
        _loop_vars = {}
        pass
        yield '\nFROM scratch AS src-'
        yield escape(environment.finalize(environment.getattr(l_1_source, 'name')))
        yield '\nADD '
        if environment.getattr(l_1_source, 'sha256'):
            pass
            yield '--checksum=sha256:'
            yield escape(environment.finalize(environment.getattr(l_1_source, 'sha256')))
            yield ' '
        yield escape(environment.finalize(t_7(environment.getattr(l_1_source, 'url'))))
        yield ' /\n'
    l_1_source = missing
    yield '\n# --- the recipes and the lists, in the file itself\nFROM scratch AS recipe\n'
    for (l_1_name, l_1_text) in context.call(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'recipes'), 'items')):
        _loop_vars = {}
        pass
        yield escape(environment.finalize(context.call((undefined(name='file') if l_0_file is missing else l_0_file), markup_join(('/', l_1_name, )), l_1_text, _loop_vars=_loop_vars)))
        yield '\n\n'
    l_1_name = l_1_text = missing
    yield '\nFROM scratch AS lists\n'
    for (l_1_name, l_1_text) in context.call(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'lists'), 'items')):
        _loop_vars = {}
        pass
        yield escape(environment.finalize(context.call((undefined(name='file') if l_0_file is missing else l_0_file), markup_join(('/', l_1_name, )), l_1_text, _loop_vars=_loop_vars)))
        yield '\n\n'
    l_1_name = l_1_text = missing
    for l_1_layer in environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'layers'):
        _loop_vars = {}
        pass
        yield escape(environment.finalize(context.call((undefined(name='file') if l_0_file is missing else l_0_file), markup_join(('/python/', environment.getattr(l_1_layer, 'stage'), '.txt', )), environment.getattr(l_1_layer, 'requirements'), _loop_vars=_loop_vars)))
        yield '\n\n'
    l_1_layer = missing
    yield '\n# --- OS packages of the image\nFROM base AS runtime\n'
    yield escape(environment.finalize(context.call((undefined(name='os_install') if l_0_os_install is missing else l_0_os_install), 'runtime')))
    yield '\n'
    yield escape(environment.finalize((undefined(name='managed_python') if l_0_managed_python is missing else l_0_managed_python)))
    yield '\n\nFROM runtime AS uv-unpack\nRUN --mount=type=bind,from=uv-wheel,target=/run/envbuild/in \\\n    '
    yield escape(environment.finalize(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'python')))
    yield ' -m zipfile -e /run/envbuild/in/uv.whl /unpacked && chmod 755 /unpacked/uv-*.data/scripts/uv && mv /unpacked/uv-*.data/scripts/uv /uv\nFROM scratch AS uv\nCOPY --from=uv-unpack /uv /uv\n\n'
    if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'layers'):
        pass
        if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'own_os'):
            pass
            yield "# The OS as one layer, by a copy of what `runtime` left: a stage's own layers have the time of the build in them.\nFROM runtime AS os-copy\nRUN --network=none --mount=type=bind,from=runtime,target=/run/envbuild/root \\\n    cp -a /run/envbuild/root /layer && "
            yield escape(environment.finalize((undefined(name='date') if l_0_date is missing else l_0_date)))
            yield '\nFROM scratch AS os\nCOPY --link --from=os-copy /layer/ /\n'
        else:
            pass
            yield 'FROM runtime AS os\n'
        yield '\n# --- torch and what it brings: a layer for each large distribution, the same in every image that holds it\n'
        for l_1_layer in context.call(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'layers_in'), 'torch'):
            _loop_vars = {}
            pass
            yield 'FROM runtime AS '
            yield escape(environment.finalize(environment.getattr(l_1_layer, 'stage')))
            yield '\n'
            yield escape(environment.finalize(context.call((undefined(name='python_layer') if l_0_python_layer is missing else l_0_python_layer), l_1_layer, _loop_vars=_loop_vars)))
            yield '\n'
        l_1_layer = missing
        yield '\nFROM os AS torch\n'
        for l_1_layer in context.call(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'layers_in'), 'torch'):
            _loop_vars = {}
            pass
            yield 'COPY --link --from='
            yield escape(environment.finalize(environment.getattr(l_1_layer, 'stage')))
            yield ' /layer/ /\n'
        l_1_layer = missing
    else:
        pass
        yield '# --- torch and what it brings\nFROM runtime AS torch\nRUN '
        yield escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), 'python-install')))
        yield ' '
        yield escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), 'compile-pyc')))
        yield ' \\\n    '
        yield escape(environment.finalize(context.call((undefined(name='listed') if l_0_listed is missing else l_0_listed), 'python.torch.txt')))
        yield ' \\\n    --mount=type=bind,from=wheels,target=/run/envbuild/wheels \\\n    '
        yield escape(environment.finalize((undefined(name='uv') if l_0_uv is missing else l_0_uv)))
        yield ' '
        yield escape(environment.finalize((undefined(name='uv_cache') if l_0_uv_cache is missing else l_0_uv_cache)))
        yield ' \\\n    '
        yield escape(environment.finalize((undefined(name='site') if l_0_site is missing else l_0_site)))
        yield ' \\\n    ENVBUILD_PYTHON='
        yield escape(environment.finalize(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'python')))
        if context.call(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'index'), 'torch'):
            pass
            yield ' ENVBUILD_INDEX='
            yield escape(environment.finalize(context.call(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'index'), 'torch')))
        if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'provided'):
            pass
            yield ' ENVBUILD_SYSTEM_SITE=1'
        yield ' \\\n    sh /run/envbuild/recipe/python-install /opt/venv /run/envbuild/python.torch.txt \\\n    && PYTHONDONTWRITEBYTECODE=1 /opt/venv/bin/python /run/envbuild/recipe/compile-pyc /opt/venv\n'
    if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'compiles'):
        pass
        yield '\n# --- compilers, build tools'
        if context.call(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'has'), 'toolchain'):
            pass
            yield ', CUDA toolkit'
        yield '; none of it reaches the image\nFROM '
        yield escape(environment.finalize(('devel' if environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'lock'), 'images') else 'runtime')))
        yield ' AS builder\n'
        if environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'lock'), 'images'):
            pass
            yield escape(environment.finalize(context.call((undefined(name='os_install') if l_0_os_install is missing else l_0_os_install), 'runtime')))
            yield '\n'
            yield escape(environment.finalize((undefined(name='managed_python') if l_0_managed_python is missing else l_0_managed_python)))
            yield '\n'
        yield escape(environment.finalize(context.call((undefined(name='os_install') if l_0_os_install is missing else l_0_os_install), 'builder')))
        yield '\n'
        if context.call(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'has'), 'tools'):
            pass
            yield 'RUN '
            yield escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), 'python-install')))
            yield ' \\\n    '
            yield escape(environment.finalize(context.call((undefined(name='listed') if l_0_listed is missing else l_0_listed), 'python.tools.txt')))
            yield ' \\\n    --mount=type=bind,from=wheels,target=/run/envbuild/wheels \\\n    '
            yield escape(environment.finalize((undefined(name='uv') if l_0_uv is missing else l_0_uv)))
            yield ' '
            yield escape(environment.finalize((undefined(name='uv_cache') if l_0_uv_cache is missing else l_0_uv_cache)))
            yield ' \\\n    '
            yield escape(environment.finalize((undefined(name='site') if l_0_site is missing else l_0_site)))
            yield ' \\\n    ENVBUILD_PYTHON='
            yield escape(environment.finalize(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'python')))
            yield ' sh /run/envbuild/recipe/python-install /opt/tools/ /run/envbuild/python.tools.txt\n'
        if context.call(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'has'), 'toolchain'):
            pass
            yield 'RUN '
            yield escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), 'python-install')))
            yield ' \\\n    '
            yield escape(environment.finalize(context.call((undefined(name='listed') if l_0_listed is missing else l_0_listed), 'python.toolchain.txt')))
            yield ' \\\n    --mount=type=bind,from=wheels,target=/run/envbuild/wheels \\\n    '
            yield escape(environment.finalize((undefined(name='uv') if l_0_uv is missing else l_0_uv)))
            yield ' '
            yield escape(environment.finalize((undefined(name='uv_cache') if l_0_uv_cache is missing else l_0_uv_cache)))
            yield ' \\\n    '
            yield escape(environment.finalize((undefined(name='site') if l_0_site is missing else l_0_site)))
            yield ' \\\n    ENVBUILD_PYTHON='
            yield escape(environment.finalize(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'python')))
            yield ' sh /run/envbuild/recipe/python-install /opt/toolchain/ /run/envbuild/python.toolchain.txt\n'
    if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'mpi'):
        pass
        yield '\n# --- MPI '
        yield escape(environment.finalize(environment.getitem(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'cell'), 'versions'), 'mpi')))
        yield '\nFROM builder AS build-mpi\nRUN --network=none '
        yield escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), 'build-native')))
        yield ' \\\n    --mount=type=bind,from=src-mpi,target=/src \\\n    sh /run/envbuild/recipe/build-native '
        yield escape(environment.finalize(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'mpi'), 'prefix')))
        for l_1_argument in environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'mpi'), 'configure'):
            _loop_vars = {}
            pass
            yield ' '
            yield escape(environment.finalize(l_1_argument))
        l_1_argument = missing
        yield '\nFROM scratch AS mpi\nCOPY --from=build-mpi '
        yield escape(environment.finalize(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'mpi'), 'prefix')))
        yield '/ /\n'
    l_1_loop = missing
    for l_1_component, l_1_loop in LoopContext(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'components'), undefined):
        _loop_vars = {}
        pass
        yield '\n# --- '
        yield escape(environment.finalize(environment.getattr(l_1_component, 'axis')))
        yield ' '
        yield escape(environment.finalize(environment.getattr(l_1_component, 'version')))
        yield ': key '
        yield escape(environment.finalize(environment.getattr(context.call(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'stage'), markup_join(('wheel-', environment.getattr(l_1_component, 'axis'), )), _loop_vars=_loop_vars), 'key')[:16]))
        yield '\nFROM builder AS build-'
        yield escape(environment.finalize(environment.getattr(l_1_component, 'axis')))
        yield '\n'
        if environment.getattr(l_1_component, 'environment'):
            pass
            yield 'ENV '
            l_2_loop = missing
            for (l_2_k, l_2_v), l_2_loop in LoopContext(context.call(environment.getattr(environment.getattr(l_1_component, 'environment'), 'items'), _loop_vars=_loop_vars), undefined):
                _loop_vars = {}
                pass
                yield escape(environment.finalize(l_2_k))
                yield '='
                yield escape(environment.finalize(t_4(l_2_v)))
                if (not environment.getattr(l_2_loop, 'last')):
                    pass
                    yield ' \\\n'
            l_2_loop = l_2_k = l_2_v = missing
            yield '\n'
        yield 'RUN --network=none '
        yield escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), 'build-wheel', _loop_vars=_loop_vars)))
        yield ' \\\n'
        for l_2_name in environment.getattr(l_1_component, 'recipes'):
            _loop_vars = {}
            pass
            yield '    '
            yield escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), l_2_name, _loop_vars=_loop_vars)))
            yield ' \\\n'
        l_2_name = missing
        yield '    --mount=type=bind,from=torch,source=/opt/venv,target=/opt/venv \\\n    --mount=type=bind,from=src-'
        yield escape(environment.finalize(environment.getattr(l_1_component, 'axis')))
        yield ',target=/src,rw \\\n'
        if (environment.getattr(l_1_component, 'mpi') and environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'mpi')):
            pass
            yield '    --mount=type=bind,from=mpi,target='
            yield escape(environment.finalize(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'mpi'), 'prefix')))
            yield ' \\\n'
        for (l_2_name, l_2_folder) in context.call(environment.getattr(environment.getattr(l_1_component, 'downloads'), 'items'), _loop_vars=_loop_vars):
            _loop_vars = {}
            pass
            yield '    --mount=type=bind,from=src-'
            yield escape(environment.finalize(l_2_name))
            yield ',target=/run/envbuild/downloads/'
            yield escape(environment.finalize(l_2_folder))
            yield ' \\\n'
        l_2_name = l_2_folder = missing
        yield '    --mount=type=cache,id=envbuild-ccache,target=/ccache \\\n    --mount=type=secret,id=jobs-'
        yield escape(environment.finalize(environment.getattr(l_1_component, 'axis')))
        yield ',target=/run/envbuild/jobs/count \\\n    '
        yield escape(environment.finalize((undefined(name='uv') if l_0_uv is missing else l_0_uv)))
        yield ' \\\n'
        if (environment.getattr(l_1_component, 'folder') != '.'):
            pass
            yield 'ENVBUILD_FOLDER='
            yield escape(environment.finalize(environment.getattr(l_1_component, 'folder')))
            yield ' '
        yield 'sh /run/envbuild/recipe/'
        for l_2_name in environment.getattr(l_1_component, 'scripts'):
            _loop_vars = {}
            pass
            yield escape(environment.finalize(l_2_name))
            yield ' '
        l_2_name = missing
        if environment.getattr(l_1_component, 'only_sms'):
            pass
            yield escape(environment.finalize(t_1(environment.getattr(l_1_component, 'only_sms'))))
            yield ' '
        yield escape(environment.finalize(environment.getattr(l_1_component, 'axis')))
        yield ' '
        if environment.getattr(l_1_component, 'extensions'):
            pass
            yield escape(environment.finalize(t_1(environment.getattr(l_1_component, 'extensions'))))
        else:
            pass
            yield '""'
        for l_2_setting in environment.getattr(l_1_component, 'config_settings'):
            _loop_vars = {}
            pass
            yield ' '
            yield escape(environment.finalize(l_2_setting))
        l_2_setting = missing
        yield '\nFROM scratch AS wheel-'
        yield escape(environment.finalize(environment.getattr(l_1_component, 'axis')))
        yield '\nCOPY --from=build-'
        yield escape(environment.finalize(environment.getattr(l_1_component, 'axis')))
        yield ' /out/ /\n'
    l_1_loop = l_1_component = missing
    yield '\n'
    if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'layers'):
        pass
        yield '# --- the rest of the Python environment\n'
        for l_1_layer in context.call(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'layers_in'), 'env'):
            _loop_vars = {}
            pass
            yield 'FROM runtime AS '
            yield escape(environment.finalize(environment.getattr(l_1_layer, 'stage')))
            yield '\n'
            yield escape(environment.finalize(context.call((undefined(name='python_layer') if l_0_python_layer is missing else l_0_python_layer), l_1_layer, _loop_vars=_loop_vars)))
            yield '\n'
        l_1_layer = missing
        for l_1_component in environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'components'):
            _loop_vars = {}
            pass
            yield 'FROM runtime AS env-wheel-'
            yield escape(environment.finalize(environment.getattr(l_1_component, 'axis')))
            yield '\nRUN '
            yield escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), 'python-install', _loop_vars=_loop_vars)))
            yield ' '
            yield escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), 'compile-pyc', _loop_vars=_loop_vars)))
            yield ' '
            yield escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), 'python-layer', _loop_vars=_loop_vars)))
            yield ' \\\n    --mount=type=bind,from=wheel-'
            yield escape(environment.finalize(environment.getattr(l_1_component, 'axis')))
            yield ',target=/run/envbuild/built \\\n    '
            yield escape(environment.finalize((undefined(name='uv') if l_0_uv is missing else l_0_uv)))
            yield ' '
            yield escape(environment.finalize((undefined(name='uv_cache') if l_0_uv_cache is missing else l_0_uv_cache)))
            yield ' \\\n    export ENVBUILD_PYTHON='
            yield escape(environment.finalize(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'python')))
            yield ' ENVBUILD_ALONE=1'
            if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'provided'):
                pass
                yield ' ENVBUILD_SYSTEM_SITE=1'
            yield ' \\\n    && sh /run/envbuild/recipe/python-layer /dev/null /run/envbuild/built/*.whl && '
            yield escape(environment.finalize((undefined(name='date') if l_0_date is missing else l_0_date)))
            yield '\n'
        l_1_component = missing
        if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'placed'):
            pass
            yield 'FROM runtime AS env-placed\nRUN set -e; \\\n'
            for (l_1_module, l_1_target) in environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'placed'):
                _loop_vars = {}
                pass
                yield '    mkdir -p "/layer$(dirname '
                yield escape(environment.finalize(l_1_target))
                yield ')"; printf \'import sys\\n\\nimport %s as module\\n\\nsys.modules[__name__] = module\\n\' '
                yield escape(environment.finalize(l_1_module))
                yield ' >/layer'
                yield escape(environment.finalize(l_1_target))
                yield '; \\\n'
            l_1_module = l_1_target = missing
            yield '    '
            yield escape(environment.finalize(context.call((undefined(name='byte_compiled') if l_0_byte_compiled is missing else l_0_byte_compiled), '/layer')))
            for (l_1_module, l_1_target) in environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'placed'):
                _loop_vars = {}
                pass
                yield ' '
                yield escape(environment.finalize(l_1_target))
            l_1_module = l_1_target = missing
            yield '; \\\n    '
            yield escape(environment.finalize((undefined(name='date') if l_0_date is missing else l_0_date)))
            yield '\n'
        if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'mpi'):
            pass
            yield 'FROM runtime AS env-mpi\nRUN --mount=type=bind,from=mpi,target=/run/envbuild/mpi \\\n    mkdir -p "/layer$(dirname '
            yield escape(environment.finalize(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'mpi'), 'prefix')))
            yield ')" && cp -a /run/envbuild/mpi /layer'
            yield escape(environment.finalize(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'mpi'), 'prefix')))
            yield ' && '
            yield escape(environment.finalize((undefined(name='date') if l_0_date is missing else l_0_date)))
            yield '\n'
        yield '\nFROM torch AS env\n'
        for l_1_layer in context.call(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'layers_in'), 'env'):
            _loop_vars = {}
            pass
            yield 'COPY --link --from='
            yield escape(environment.finalize(environment.getattr(l_1_layer, 'stage')))
            yield ' /layer/ /\n'
        l_1_layer = missing
        for l_1_component in environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'components'):
            _loop_vars = {}
            pass
            yield 'COPY --link --from=env-wheel-'
            yield escape(environment.finalize(environment.getattr(l_1_component, 'axis')))
            yield ' /layer/ /\n'
        l_1_component = missing
        if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'placed'):
            pass
            yield 'COPY --link --from=env-placed /layer/ /\n'
        if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'mpi'):
            pass
            yield 'COPY --link --from=env-mpi /layer/ /\n'
    else:
        pass
        yield '# --- the Python environment, complete\nFROM torch AS env\nRUN '
        yield escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), 'python-install')))
        yield ' '
        yield escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), 'compile-pyc')))
        yield ' \\\n    '
        yield escape(environment.finalize(context.call((undefined(name='listed') if l_0_listed is missing else l_0_listed), 'python.env.txt')))
        yield ' \\\n    --mount=type=bind,from=wheels,target=/run/envbuild/wheels \\\n'
        for l_1_component in environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'components'):
            _loop_vars = {}
            pass
            yield '    --mount=type=bind,from=wheel-'
            yield escape(environment.finalize(environment.getattr(l_1_component, 'axis')))
            yield ',target=/run/envbuild/built/'
            yield escape(environment.finalize(environment.getattr(l_1_component, 'axis')))
            yield ' \\\n'
        l_1_component = missing
        yield '    '
        yield escape(environment.finalize((undefined(name='uv') if l_0_uv is missing else l_0_uv)))
        yield ' '
        yield escape(environment.finalize((undefined(name='uv_cache') if l_0_uv_cache is missing else l_0_uv_cache)))
        yield ' \\\n    '
        yield escape(environment.finalize((undefined(name='site') if l_0_site is missing else l_0_site)))
        yield ' \\\n    export ENVBUILD_PYTHON='
        yield escape(environment.finalize(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'python')))
        if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'provided'):
            pass
            yield ' ENVBUILD_BROUGHT="'
            yield escape(environment.finalize(t_8(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'provided'))))
            yield '"'
        yield ' \\\n    && sh /run/envbuild/recipe/python-install /opt/venv /run/envbuild/python.env.txt'
        for l_1_component in environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'resolved_wheels'):
            _loop_vars = {}
            pass
            yield ' /run/envbuild/built/'
            yield escape(environment.finalize(environment.getattr(l_1_component, 'axis')))
            yield '/*.whl'
        l_1_component = missing
        yield ' \\\n'
        if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'lone_wheels'):
            pass
            yield '    && ENVBUILD_ALONE=1 sh /run/envbuild/recipe/python-install /opt/venv /dev/null'
            for l_1_component in environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'lone_wheels'):
                _loop_vars = {}
                pass
                yield ' /run/envbuild/built/'
                yield escape(environment.finalize(environment.getattr(l_1_component, 'axis')))
                yield '/*.whl'
            l_1_component = missing
            yield ' \\\n'
        for (l_1_module, l_1_target) in environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'placed'):
            _loop_vars = {}
            pass
            yield '    && mkdir -p "$(dirname '
            yield escape(environment.finalize(l_1_target))
            yield ')" && printf \'import sys\\n\\nimport %s as module\\n\\nsys.modules[__name__] = module\\n\' '
            yield escape(environment.finalize(l_1_module))
            yield ' >'
            yield escape(environment.finalize(l_1_target))
            yield ' \\\n'
        l_1_module = l_1_target = missing
        yield '    && PYTHONDONTWRITEBYTECODE=1 /opt/venv/bin/python /run/envbuild/recipe/compile-pyc /opt/venv\n'
        for l_1_component in environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'components'):
            _loop_vars = {}
            pass
            yield 'COPY --from=wheel-'
            yield escape(environment.finalize(environment.getattr(l_1_component, 'axis')))
            yield ' /record.json /opt/envbuild/built/'
            yield escape(environment.finalize(environment.getattr(l_1_component, 'axis')))
            yield '.json\n'
        l_1_component = missing
        yield '# What `pip install` in the image must leave as it is.\nRUN --network=none '
        yield escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), 'constraints')))
        yield ' \\\n    mkdir -p /opt/envbuild && PYTHONDONTWRITEBYTECODE=1 /opt/venv/bin/python /run/envbuild/recipe/constraints'
        for l_1_name in environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'held'):
            _loop_vars = {}
            pass
            yield ' '
            yield escape(environment.finalize(l_1_name))
        l_1_name = missing
        yield ' >'
        yield escape(environment.finalize(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'constraints')))
        yield '\n'
        if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'mpi'):
            pass
            yield 'COPY --from=mpi / '
            yield escape(environment.finalize(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'mpi'), 'prefix')))
            yield '/\n'
    if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'stack'):
        pass
        template = environment.get_template('stack.j2', 'Dockerfile.j2')
        gen = template.root_render_func(template.new_context(context.get_all(), True, {'apt': l_0_apt, 'byte_compiled': l_0_byte_compiled, 'compiled_library': l_0_compiled_library, 'date': l_0_date, 'environment': l_0_environment, 'file': l_0_file, 'listed': l_0_listed, 'managed_python': l_0_managed_python, 'os_install': l_0_os_install, 'own_files': l_0_own_files, 'python_layer': l_0_python_layer, 'recipe': l_0_recipe, 'site': l_0_site, 'uv': l_0_uv, 'uv_cache': l_0_uv_cache}))
        try:
            for event in gen:
                yield event
        finally: gen.close()
    yield '\n'
    if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'layers'):
        pass
        yield '# --- what envbuild itself puts into the image\nFROM env AS own\nRUN --network=none '
        yield escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), 'constraints')))
        yield ' \\\n    --mount=type=bind,from=lists,source=/lock,target=/run/envbuild/lock \\\n    --mount=type=bind,from=lists,source=/image,target=/run/envbuild/image \\\n'
        for l_1_component in environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'components'):
            _loop_vars = {}
            pass
            yield '    --mount=type=bind,from=wheel-'
            yield escape(environment.finalize(environment.getattr(l_1_component, 'axis')))
            yield ',target=/run/envbuild/built/'
            yield escape(environment.finalize(environment.getattr(l_1_component, 'axis')))
            yield ' \\\n'
        l_1_component = missing
        yield '    mkdir -p /layer/opt/envbuild'
        if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'components'):
            pass
            yield '/built'
        yield ' \\\n    && cp /run/envbuild/lock/* /layer/opt/envbuild/ \\\n'
        for l_1_component in environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'components'):
            _loop_vars = {}
            pass
            yield '    && cp /run/envbuild/built/'
            yield escape(environment.finalize(environment.getattr(l_1_component, 'axis')))
            yield '/record.json /layer/opt/envbuild/built/'
            yield escape(environment.finalize(environment.getattr(l_1_component, 'axis')))
            yield '.json \\\n'
        l_1_component = missing
        yield '    && PYTHONDONTWRITEBYTECODE=1 /opt/venv/bin/python /run/envbuild/recipe/constraints'
        for l_1_name in environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'held'):
            _loop_vars = {}
            pass
            yield ' '
            yield escape(environment.finalize(l_1_name))
        l_1_name = missing
        yield ' >/layer'
        yield escape(environment.finalize(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'constraints')))
        yield ' \\\n    && find /layer/opt/envbuild -type f -exec chmod 644 {} + \\\n    && '
        yield escape(environment.finalize(context.call((undefined(name='own_files') if l_0_own_files is missing else l_0_own_files), '/layer')))
        yield ' \\\n    && '
        yield escape(environment.finalize((undefined(name='date') if l_0_date is missing else l_0_date)))
        yield "\n\n# uv and pip, to install more packages; compiled byte code of Python's own library, so that no start compiles it again\nFROM runtime AS installers\nRUN "
        yield escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), 'compile-pyc')))
        yield ' '
        if (not environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'provided')):
            pass
            yield '--mount=type=bind,from=lists,source=/image,target=/run/envbuild/image '
        yield escape(environment.finalize((undefined(name='uv') if l_0_uv is missing else l_0_uv)))
        yield ' \\\n    mkdir -p /layer/usr/local/bin && cp /run/envbuild/uv/uv /layer/usr/local/bin/uv \\\n'
        if (not environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'provided')):
            pass
            yield '    && cp /run/envbuild/image/pip /layer/usr/local/bin/pip \\\n'
        yield '    && chmod 755 /layer/usr/local/bin/* \\\n    && '
        yield escape(environment.finalize(context.call((undefined(name='compiled_library') if l_0_compiled_library is missing else l_0_compiled_library), '/layer')))
        yield ' && '
        yield escape(environment.finalize((undefined(name='date') if l_0_date is missing else l_0_date)))
        yield '\n\n'
    yield 'FROM '
    yield escape(environment.finalize(('stack' if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'stack') else 'env')))
    yield ' AS image\n'
    if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'layers'):
        pass
        yield 'COPY --link --from=installers /layer/ /\n'
    else:
        pass
        yield 'COPY --from=uv /uv /usr/local/bin/uv\n'
        if (not environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'provided')):
            pass
            yield 'COPY --from=lists --chmod=755 /image/pip /usr/local/bin/pip\n'
    if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'compat'):
        pass
        yield '# '
        yield escape(environment.finalize(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'compat'), 'package')))
        yield ': the driver libraries of branch '
        yield escape(environment.finalize(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'compat'), 'branch')))
        yield '; cuda-compat.sh decides as the image starts.\nRUN --network=none '
        yield escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), 'cuda-compat')))
        yield ' \\\n    --mount=type=bind,from=src-cuda-compat,target=/run/envbuild/deb \\\n    sh /run/envbuild/recipe/cuda-compat '
        yield escape(environment.finalize(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'compat'), 'folder')))
        yield ' '
        yield escape(environment.finalize(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'compat'), 'branch')))
        yield '\n'
    if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'layers'):
        pass
        yield 'COPY --link --from=own /layer/ /\n'
    else:
        pass
        yield 'COPY --from=lists /lock/ /opt/envbuild/\nRUN --network=none '
        yield escape(environment.finalize(context.call((undefined(name='recipe') if l_0_recipe is missing else l_0_recipe), 'compile-pyc')))
        yield ' --mount=type=bind,from=lists,source=/image,target=/run/envbuild/image \\\n    '
        yield escape(environment.finalize(context.call((undefined(name='own_files') if l_0_own_files is missing else l_0_own_files), '')))
        yield ' \\\n    && '
        yield escape(environment.finalize(context.call((undefined(name='compiled_library') if l_0_compiled_library is missing else l_0_compiled_library), '')))
        yield '\n'
    yield escape(environment.finalize((undefined(name='environment') if l_0_environment is missing else l_0_environment)))
    yield '\nLABEL '
    l_1_loop = missing
    for (l_1_k, l_1_v), l_1_loop in LoopContext(context.call(environment.getattr(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'labels'), 'items')), undefined):
        _loop_vars = {}
        pass
        yield escape(environment.finalize(l_1_k))
        yield '='
        yield escape(environment.finalize(t_4(l_1_v)))
        if (not environment.getattr(l_1_loop, 'last')):
            pass
            yield ' \\\n'
    l_1_loop = l_1_k = l_1_v = missing
    yield '\nWORKDIR '
    yield escape(environment.finalize(environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'workdir')))
    yield '\n'
    if environment.getattr((undefined(name='plan') if l_0_plan is missing else l_0_plan), 'compat'):
        pass
        yield 'ENTRYPOINT ["/bin/sh", "-c", ". /opt/envbuild/cuda-compat.sh; exec \\"$@\\"", "cuda-compat"]\n'
    yield 'CMD ["/bin/bash"]\n'

blocks = {}
debug_info = '1=62&2=70&4=73&5=81&8=89&10=91&11=94&14=99&15=101&16=110&17=112&19=123&20=131&21=139&22=147&23=150&24=157&26=164&27=171&29=178&30=185&31=187&34=189&35=191&36=193&39=205&38=222&45=228&44=233&50=241&51=244&52=251&53=264&55=266&56=270&57=272&58=288&65=300&67=305&68=311&70=319&71=326&74=334&75=339&76=344&78=351&79=355&81=360&84=378&86=381&89=387&90=391&97=406&98=410&100=414&101=416&103=421&105=425&106=427&111=436&112=439&117=443&118=446&121=449&122=452&128=456&129=458&133=460&137=462&138=464&142=467&150=473&151=477&152=479&156=483&157=487&162=493&163=497&165=499&166=503&167=505&171=514&173=517&174=521&175=523&176=525&177=527&179=529&180=531&181=534&182=536&184=538&185=542&186=544&188=546&189=549&190=551&192=553&193=557&194=559&197=561&199=564&201=566&203=568&206=576&208=579&210=583&211=589&212=591&213=595&217=607&218=609&219=613&222=617&223=619&224=622&226=624&227=628&230=634&231=636&232=638&234=669&235=671&238=675&240=678&241=682&242=684&244=687&245=691&246=693&247=699&248=701&249=705&250=711&252=714&255=717&256=721&258=729&259=737&261=739&264=742&268=749&269=753&271=756&272=760&274=763&277=766&283=772&284=776&286=778&287=782&289=788&290=792&291=794&292=801&293=809&294=812&296=820&297=824&300=832&301=836&304=842&305=844&306=853&307=856&310=858&311=860&314=867&317=870&320=872&321=876&323=882&325=886&326=890&328=896&330=905&331=907&335=909&337=916&341=920&344=925&345=927&349=933&353=936&354=939&355=943&357=945&359=949&363=955&364=957&365=959&367=961&368=964&371=975&372=977'