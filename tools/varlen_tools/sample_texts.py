"""Short texts of many kinds, on which two tokenizers are compared."""

# Spaces, case, accents, other scripts, digits, signs, rare words.
TEXTS = (
    "",
    "A plain sentence, with some punctuation!",
    "  two  spaces,\ttabs\nand lines \r\n",
    "CamelCase UPPER lower MiXeD",
    "naïve café Ångström ﬁne ① ½ Ｆｕｌｌ",
    "Das Mädchen ißt; los niños; la forêt; škola; ĳs",
    "Привет, мир. Γειά σου Κόσμε. שלום עולם مرحبا بالعالم",
    "你好，世界。こんにちは世界 안녕하세요 세계 สวัสดีชาวโลก नमस्ते दुनिया",
    "1234567890 3.14 -42 1,000,000 0x1F 50% $9.99 €5",
    "a@b.org https://example.org/path?x=1&y=2#z snake_case kebab-case it's don't",
    "for (int i = 0; i < n; ++i) { sum += a[i]; } // code",
    "emoji 🙂👩🇫🇷 ™ © — … “quotes” ‹›",
    "antidisestablishmentarianism pneumonoultramicroscopic",
    "e\u0301 zero\u200bwidth soft\u00adhyphen no\u00a0break",
)
