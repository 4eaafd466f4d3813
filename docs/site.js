// In a query "-word" excludes a word: people who type "--flag" mean the flag.
document.addEventListener(
  "input",
  ({ target }) => {
    if (target.matches("[data-md-component=search-query]")) {
      target.value = target.value.replace(/(^|\s)--(?=\w)/g, "$1");
    }
  },
  true,
);
